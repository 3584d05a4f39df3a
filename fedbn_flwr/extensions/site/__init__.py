"""Operating a site: `fedbn check` before a run, and a mod that records the last messages."""

PARTS = {
    "commands": {"check": "check:add"},
    "app_mods": {"record_status": "record:record_status"},
}
