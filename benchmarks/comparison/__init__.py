"""The implementation of `compare.py`, which compares regularizers in paired training runs.

`spec` describes a comparison, `data` loads images, `run` trains one run, `engines` execute and store runs, `analysis`
computes results from their records, and `report` displays them. `preview` runs before the first training run, `costs`
after the last. Imports point downward: `report`; `analysis` and `engines`; `run`; `data`; `spec`.
"""
