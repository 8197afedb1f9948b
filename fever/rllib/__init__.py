"""RLlib's algorithms behind fever's commands: `--algo rllib:PPO`, or your own subclass, `--algo rllib:module:Name`.

`provider.py` is what the rest of fever calls, through `fever.algos.registry`. `catalogue.py` finds the algorithms of
the installed RLlib, `settings.py` turns a fever configuration into RLlib's, `adapter.py` is the learner that the
trainer drives, `metrics.py` translates RLlib's results, `environment.py` makes environments the way RLlib expects, and
`play.py` acts with a checkpoint's weights. `legacy/` understands files and options of the removed `rllib train`
command.

Algorithms and settings are looked up in the installed RLlib, so new ones need no change here.
"""
