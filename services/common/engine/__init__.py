"""Models, KV caches and logit processors: torch and transformers. No grpc."""

import os

# Where draft and target share a machine, the threads of one worker's last pass take the cores from the other's next one
# for as long as they spin: with libgomp's own limit a step of the default draft took 5 ms and a pass 45, with this 3.4
# and 33, and a worker that is alone loses nothing that could be measured. It counts before torch is loaded only.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
