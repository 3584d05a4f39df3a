"""Whether batch norm will hurt, before training: `fedbn diagnose`."""

PARTS = {
    "client_keys": {"fedbn.gradients": "strategy:GradientsClient"},
    "commands": {"diagnose": "command:add"},
}
