"""Errors that a machine with a CPU alone can't have, in the words of the libraries that
write them.
"""

EXAMPLES = {
    "NCCL: unhandled system error": (
        "torch.distributed.DistBackendError: NCCL error in: "
        "ProcessGroupNCCL.cpp:3384, unhandled system error (run with "
        "NCCL_DEBUG=INFO for details), NCCL version 2.27.3\nncclSystemError: "
        "System call (e.g. socket, malloc) or external library call failed or "
        "device error."
    ),
    "NCCL: one GPU for two ranks": (
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL "
        "library.\nLast error:\nDuplicate GPU detected : rank 1 and rank 0 both on "
        "CUDA device 19000"
    ),
    "NCCL: no interface": (
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL "
        "library.\nLast error:\nBootstrap : no socket interface found"
    ),
    "NCCL: invalid usage": (
        "NCCL error in: ProcessGroupNCCL.cpp:340, invalid usage, NCCL version 2.27.3"
    ),
    "NCCL: shared memory": (
        "NCCL WARN Error while creating shared memory segment /dev/shm/nccl-Xq2p (size 9637888)"
    ),
    "NCCL: InfiniBand": "NCCL WARN Call to ibv_modify_qp failed with error Connection timed out",
    "NCCL: timeout of a collective": (
        "[Rank 1] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=12, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600029"
        " milliseconds before timing out."
    ),
    "NCCL: a peer is gone": (
        "ncclRemoteError: A call failed possibly due to a network error or a "
        "remote process exiting prematurely."
    ),
    "NCCL: internal error": "ncclInternalError: Internal check failed.",
    "NCCL: a CUDA call failed": "ncclUnhandledCudaError: Call to CUDA function failed.",
    "GPU memory is full": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. "
        "GPU 0 has a total capacity of 23.65 GiB of which 1.31 GiB is free."
    ),
    "no such GPU": "torch.AcceleratorError: CUDA error: invalid device ordinal",
    "the driver is too old": "The NVIDIA driver on your system is too old (found version 11040).",
    "torch does not know this GPU": (
        "CUDA error: no kernel image is available for execution on the device"
    ),
    "an assertion on the GPU": "torch.AcceleratorError: CUDA error: device-side assert triggered",
    "illegal memory access": "CUDA error: an illegal memory access was encountered",
    "invalid configuration argument": "RuntimeError: CUDA error: invalid configuration argument",
    "the GPU is broken": "CUDA error: uncorrectable ECC error encountered",
    "CUDA in a fork": (
        "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use "
        "CUDA with multiprocessing, you must use the 'spawn' start method"
    ),
}
