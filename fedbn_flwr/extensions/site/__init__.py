"""Operating a site: `fedbn check` before a run, `fedbn model`, `fedbn predict` and `fedbn export` after it."""

PARTS = {
    "commands": {
        "check": "check:add",
        "model": "model:add_model",
        "predict": "model:add_predict",
        "export": "model:add_export",
        "adapt": "adapt:add",
    }
}
