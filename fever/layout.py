"""Names of the files and folders in a run directory; docs/run-directory.md explains each. No module spells them out.

The files in the job's folder are in `fever/job.py`.
"""

CONFIG = "config.yaml"
FACTS = "facts.json"
METRICS = "metrics.jsonl"
EPISODES = "episodes.jsonl"
EVALUATIONS = "evaluations.jsonl"
EVENTS = "events.out.tfevents"  # TensorBoard's files begin with it
SUMMARY = "summary.json"
LOG = "log.txt"
LOCK = "lock"
REPLAY = "replay"
WORK = "work"
JOB = "job"
VIDEOS = "videos"
TRACKERS = "trackers"
CURVES = "curves.png"
COMPARED = "compared.png"
EXPORTED = "exported_policy"
EXPORTED_ONNX = "exported_onnx"

CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"  # in a checkpoint, as the next two
ARRAYS = "arrays.safetensors"
FILES = "files"

TRIALS = "trials"  # in a search, as all that follow
TRIALS_TABLE = "trials.jsonl"
BEST = "best.yaml"
PICTURE = "search.png"
TUNE = "tune"
ORIGIN = "origin.json"  # in the copy of a trial: whose it is
COPIED = "copied.json"  # in a trial: the copies that it continued from
