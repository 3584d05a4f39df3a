"""Operating a site: `fedbn check` before a run, `fedbn model` and `fedbn predict` after it."""

PARTS = {"commands": {"check": "check:add", "model": "model:add_model", "predict": "model:add_predict"}}
