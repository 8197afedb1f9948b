"""Names of the files and folders in a run directory; docs/run-directory.md explains each. No module spells them out.

The files in the job's folder are in `fever/job.py`.
"""

CONFIG = "config.yaml"
FACTS = "facts.json"
METRICS = "metrics.jsonl"
EPISODES = "episodes.jsonl"
OLD_EPISODES = "episodes-old.jsonl.gz"  # moved there from the file above
EVALUATIONS = "evaluations.jsonl"
EVENTS = "events.out.tfevents"  # TensorBoard's files begin with it
SUMMARY = "summary.json"
WORKERS = "workers.json"
LOG = "log.txt"
SIGNATURE = "signature"  # that the run was made on this account; also in the job's folder
LOCK = "lock"
REPLAY = "replay"
WORK = "work"
JOB = "job"
VIDEOS = "videos"
TRAINING_VIDEO = "video-"  # begins the names of those made during training
TRACKERS = "trackers"
CURVES = "curves.png"
COMPARED = "compared.png"
SEEDS = "seeds.png"  # in the first run of `fever train --seeds`
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

# What fever itself makes at the top of a run directory, TensorBoard's files aside: it writes and deletes nothing else.
OWN = frozenset({
    CONFIG, FACTS, SIGNATURE, METRICS, EPISODES, OLD_EPISODES, EVALUATIONS, SUMMARY, WORKERS, LOG, LOCK, REPLAY, WORK,
    JOB, VIDEOS,
    TRACKERS, CURVES, COMPARED, SEEDS, EXPORTED, EXPORTED_ONNX, CHECKPOINTS, TRIALS, TRIALS_TABLE, BEST, PICTURE, TUNE,
    ORIGIN, COPIED,
})  # fmt: skip
