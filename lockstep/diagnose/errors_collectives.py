"""Known errors of collectives: ranks that met, and then did not agree or lost one another."""

from lockstep.diagnose.entry import KnownError

COLLECTIVES = (
    KnownError(
        "collectives differ between ranks",
        r"detected mismatch between collectives|CollectiveFingerPrint",
        "ranks called different collectives, or the same with different shapes or dtypes",
        "look for a collective, a save or an evaluation inside `if rank == 0`, and for batches of unequal shape",
    ),
    KnownError(
        "sizes differ in a collective",
        r"op\.preamble\.length <= op\.nbytes|invalid tensor size at index",
        "ranks gave tensors of different sizes to one collective",
        "give each rank the same shape (pad, or exchange the sizes first); distributed.debug: detail names the call",
    ),
    KnownError(
        "a rank misses the barrier",
        r"failed to pass monitoredBarrier",
        "the rank that is named did not reach a barrier that the others wait at",
        "look at that rank's log and stacks: it is slower, stuck, or took another way through the code",
    ),
    KnownError(
        "models differ in shape",
        r"appears not to match (sizes|strides) of the same param",
        "ranks built models whose parameters have different shapes",
        "build the model from the same config on all ranks, and from nothing that a rank finds in its own data",
    ),
    KnownError(
        "models differ in parameters",
        r"DDP expects same model across all ranks",
        "ranks built models with different numbers of parameters",
        "build the model from the same config and code on all ranks; freeze the same parameters everywhere",
    ),
    KnownError(
        "wrong root",
        r"invalid root rank|must (not )?be specified on (the )?(non-)?source rank|source rank.* must be|"
        r"``?scatter_list``?|``?gather_list``? must",
        "a broadcast, scatter or gather names a root that is no rank of its group, or lists were given on other ranks",
        "src= and dst= are global ranks; lists are given on that rank only",
    ),
    KnownError(
        "mean of whole numbers",
        r"result type Float can't be cast to the desired output type|AVG .*(integer|integral)",
        "the mean of an integer tensor was asked for",
        "reduce value.float(), or use lockstep.all_reduce",
    ),
    KnownError(
        "no backend for the device",
        r"no backend type associated with device type|tensors must be CUDA and dense",
        "the tensor is on a device that the process group's backend does not serve: a CPU tensor with NCCL, or a CUDA "
        "tensor with MPI",
        "move it to this rank's device, or set distributed.backend: auto, which serves both",
    ),
    KnownError(
        "bf16 compression on gloo",
        r"BF16 all reduce communication hook required",
        "torch's bf16 hook for DDP refuses gloo",
        "distributed.ddp.compression.kind: bf16 works on gloo too; or choose none",
    ),
    KnownError(
        "NCCL: unhandled system error",
        r"ncclSystemError|NCCL error.*unhandled system error|unhandled system error \(run with NCCL_DEBUG",
        "a system call under NCCL failed: no usable interface, a blocked port, too little locked or shared memory",
        "NCCL_DEBUG=INFO (distributed.debug: detail) names the call; set NCCL_SOCKET_IFNAME to the interface between "
        "the machines; without InfiniBand NCCL_IB_DISABLE=1; see `lockstep doctor` for ulimits and /dev/shm",
        example="torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3384, unhandled system error "
        "(run with NCCL_DEBUG=INFO for details), NCCL version 2.27.3\nncclSystemError: System call (e.g. socket, "
        "malloc) or external library call failed or device error.",
        needs="GPUs",
    ),
    KnownError(
        "NCCL: one GPU for two ranks",
        r"duplicate GPU detected",
        "two ranks use the same GPU: the device was not set from the local rank",
        "lockstep.setup() sets it; else torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before anything else; "
        "one rank a GPU (--nproc-per-node)",
        example="ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\nDuplicate GPU "
        "detected : rank 1 and rank 0 both on CUDA device 19000",
        needs="GPUs",
    ),
    KnownError(
        "NCCL: no interface",
        r"no socket interface found",
        "NCCL_SOCKET_IFNAME matches no interface of this machine that is up",
        "`ip -br addr` lists them; unset it, and Lockstep takes the one on the way to rank 0",
        example="ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\nBootstrap : no "
        "socket interface found",
        needs="GPUs",
    ),
    KnownError(
        "NCCL: invalid usage",
        r"ncclInvalidUsage|NCCL error.*invalid usage",
        "NCCL was used in a way that it refuses: CPU tensors, one GPU for two ranks, mixed devices in one group",
        "nccl is for CUDA tensors: distributed.backend: auto; one GPU a rank, set from the local rank",
        example="NCCL error in: ProcessGroupNCCL.cpp:340, invalid usage, NCCL version 2.27.3",
        needs="GPUs",
    ),
    KnownError(
        "NCCL: shared memory",
        r"error while creating shared memory segment|/dev/shm/nccl",
        "/dev/shm is full or too small: containers get 64 MB",
        "docker run --shm-size=8g (or --ipc=host); in Kubernetes an emptyDir of medium Memory on /dev/shm",
        example="NCCL WARN Error while creating shared memory segment /dev/shm/nccl-Xq2p (size 9637888)",
        needs="GPUs",
    ),
    KnownError(
        "NCCL: InfiniBand",
        r"call to ibv_\w+ failed|ibv_\w+ (failed|error)|got completion .* with error",
        "an InfiniBand or RoCE call failed: a port that is down, another subnet, too little locked memory",
        "`ibstat` must say Active; `ulimit -l` unlimited; NCCL_IB_HCA chooses the card; NCCL_IB_DISABLE=1 shows "
        "whether it is InfiniBand",
        example="NCCL WARN Call to ibv_modify_qp failed with error Connection timed out",
        needs="InfiniBand",
    ),
    KnownError(
        "NCCL: timeout of a collective",
        r"watchdog caught collective operation timeout|NCCL.*timed out|Timeout\(ms\)=\d+",
        "a collective did not end in time: one rank did not call it, or is much slower",
        "look at the first rank that stood still (logs/rank-*.stacks.txt); a longer time is "
        "distributed.timeout_seconds, and NCCL_TIMEOUT does nothing in torch",
        example="[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE, "
        "Timeout(ms)=600000) ran for 600029 milliseconds before timing out.",
        needs="GPUs",
        consequence=True,
    ),
    KnownError(
        "NCCL: a peer is gone",
        r"ncclRemoteError|remote process exited or there was a network error|NCCL communicator was aborted",
        "another rank ended, or the network between them failed",
        "look at the first rank that failed",
        example="ncclRemoteError: A call failed possibly due to a network error or a remote process exiting "
        "prematurely.",
        needs="GPUs",
        consequence=True,
    ),
    KnownError(
        "NCCL: internal error",
        r"ncclInternalError|NCCL error.*internal error",
        "NCCL found itself in a state that it does not expect; often versions of NCCL differ, or memory ran out",
        "compare versions on all ranks with `lockstep doctor`; NCCL_DEBUG=INFO says where",
        example="ncclInternalError: Internal check failed.",
        needs="GPUs",
    ),
    KnownError(
        "NCCL: a CUDA call failed",
        r"ncclUnhandledCudaError|NCCL error.*unhandled cuda error",
        "a CUDA call under NCCL failed: out of memory, a driver that does not fit, a GPU that is gone",
        "free GPU memory (NCCL needs some hundred MB); compare driver and CUDA with `lockstep doctor`; `nvidia-smi`",
        example="ncclUnhandledCudaError: Call to CUDA function failed.",
        needs="GPUs",
    ),
    KnownError(
        "a collective timed out",
        r"timed out waiting \d+ ?ms for (send|recv) operation",
        "another rank did not come to the collective in time: it failed, stands still, or took another way",
        "look at the first rank that failed or stood still; a longer time is distributed.timeout_seconds",
        consequence=True,
    ),
    KnownError(
        "a peer is gone",
        r"connection (closed|reset) by peer|broken pipe",
        "another rank ended, and this one lost its connection",
        "look at the first rank that failed; if none did, at the machine's `dmesg` and at the network",
        consequence=True,
    ),
)
