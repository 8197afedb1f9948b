"""How the speed of a training depends on the number of workers, nodes or hosts: measured, explained, predicted.

warmup    when a run is warm; the callback that ends a measurement
measure   runs every count in turn, as ordinary trainings; reads what their run directories say
probe     how much of an environment's step is spent computing
model     speed by count, fitted to what was measured
figures   means, intervals over the rounds, speedups
words     the answer, the bottleneck, what to change
report    report.json, report.md, tables
picture   speedup.png, speedup.svg
study     all of it together
"""
