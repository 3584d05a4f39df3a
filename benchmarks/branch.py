"""Continue a run under another label of an experiment file, from the round of its checkpoint.

python benchmarks/branch.py RUN_FOLDER EXPERIMENT LABEL OUT [OVERRIDE ...]
fedbn run EXPERIMENT [OVERRIDE ...] --out OUT --resume

FixBN and ordinary batch norm are the same computation up to the freeze, so one run serves both.
"""

import shutil
import sys
from dataclasses import replace
from pathlib import Path

from fedbn_flwr.experiment.file.layers import load_experiment
from fedbn_flwr.experiment.prepare import make_rule
from fedbn_flwr.experiment.run.launch import run_folders
from fedbn_flwr.messages.serialization import dump, parse
from fedbn_flwr.results.folder.reader import deciding
from fedbn_flwr.results.folder.writer import RunFolder
from fedbn_flwr.results.yaml_text import dump_yaml
from fedbn_flwr.strategies import state_of

source, file, label, out, *overrides = sys.argv[1:]
experiment = load_experiment(file, overrides)
place = [run.label for run in experiment.runs].index(label)
run, target = experiment.runs[place], run_folders(experiment, Path(out))[place]
checkpoint = RunFolder(Path(source)).checkpoint
snapshot, clients = checkpoint.read(), checkpoint.clients()
assert snapshot.strategy is not None, snapshot.unsaved

rule = make_rule(run)
rule.begin(run.rounds, snapshot.model["arrays"])
# Which partition each node has is in the state of the innermost strategy, the last one.
state = dump([*parse(state_of(rule), list)[:-1], parse(snapshot.strategy, list)[-1]])

shutil.copytree(source, target.path)
(target.path / "summary.json").unlink(missing_ok=True)
(target.path / "config.yaml").write_text(dump_yaml(run.model_dump(mode="json")))
snapshot = replace(snapshot, strategy=state, settings=deciding(run.model_dump(mode="json")))
target.checkpoint.write(snapshot, None if clients is None else list(clients))
