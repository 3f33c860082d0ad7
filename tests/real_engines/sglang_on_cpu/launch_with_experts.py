"""``sglang.launch_server`` for a server that returns the experts of tokens, on a CPU.

SGLang registers the memory that it keeps them in with CUDA, also where there is none. The processes that it starts
import this file, too.
"""

import sys

import sglang.srt.mem_cache.pool_host.common as memory

memory._cuda_host_register = lambda *args, **options: None

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    run_server(prepare_server_args(sys.argv[1:]))
