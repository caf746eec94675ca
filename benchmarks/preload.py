"""What the server imports from which the peers are forked.

``torch._dynamo`` is what the first optimizer of a process would import, for seconds.
"""

import torch._dynamo
import torch.distributed.nn
import torch.distributed.optim
import torch.distributed.rpc  # noqa: F401

import benchmarks.processes
import benchmarks.systems.local_system
import benchmarks.systems.tensorplay_system
import benchmarks.systems.torch_system  # noqa: F401
