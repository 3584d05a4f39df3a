"""Operating a site: `fedbn check` before a run."""

PARTS = {"commands": {"check": "check:add"}}
