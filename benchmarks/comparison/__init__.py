"""The parts of `compare.py`, which compares regularizers in paired training runs.

`spec` is what is asked for, `data` the images, `run` one training run, `engines` make and store runs, `analysis` turns
their records into findings, and `report` shows them. `checks` and `estimate` come before the first run, `costs` after
the last. Imports point downward: `report`; `analysis` and `engines`; `run`; `data`; `spec`.
"""
