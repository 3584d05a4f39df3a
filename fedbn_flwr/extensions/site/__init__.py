"""Operating a site: `fedbn check` before a run, and `fedbn metrics` with a mod that records the last messages."""

PARTS = {
    "commands": {"check": "check:add", "metrics": "metrics:add"},
    "app_mods": {"record_status": "status:record_status"},
}
