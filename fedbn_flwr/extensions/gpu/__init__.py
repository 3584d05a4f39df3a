"""Worker processes of the local engine that are new interpreters, as training on GPUs needs them."""

PARTS = {"workers": {"spawn": "spawned:spawned"}}
