"""Models, KV caches and logit processors: torch and transformers. No grpc."""

import os

# Where draft and target share a machine, the threads of one worker's last pass take the cores from the other's next one
# for as long as they spin. On two cores, in a few runs of a noisy machine, a step of the default draft took 5 ms and a
# pass of five positions 45 to 85 with libgomp's own limit, 3.4 and 33 to 37 with this one; a pass alone took 29 to 32
# and 29 to 32. It counts before torch is loaded only.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
