"""Normalisation layers: roles of their arrays, conversion, freezing, statistics."""

# What can replace batch norm, by the names in an experiment; `convert` has how. Without importing PyTorch.
NORMS = {
    "bn": "batch norm: the model is not changed",
    "gn": "group norm with `groups` groups (default 2)",
    "ln": "layer norm over channels and places of an example",
    "in": "instance norm",
    "none": "no normalisation",
    "gn+ws": "group norm, and convolutions with weight standardisation",
    "fixup": "no normalisation, and Fixup's scalars and initial weights (for ResNets)",
    "won": "no normalisation, and convolutions with scaled weight standardisation (FedWon); `branch_scale` for ResNets",
    "sbn": "static batch norm: batch statistics, none tracked (HeteroFL)",
    "brn": "batch renormalisation: the same output in training as in evaluation, within growing bounds",
    "hbn": "hybrid batch norm: a learnt mix of the batch's statistics and the running ones (HBN)",
}
