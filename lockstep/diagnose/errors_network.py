"""Known errors between ranks: those that do not meet, that call different collectives, or lose one another."""

from lockstep.diagnose import KnownError

RENDEZVOUS = (
    KnownError(
        "address in use",
        r"EADDRINUSE|address already in use",
        "another process listens on the port where the ranks meet: another run, or one that has not gone yet",
        "choose another --master-port (MASTER_PORT); on one machine leave it out, and a free one is found; "
        "`ss -ltnp` says who has the port",
    ),
    KnownError(
        "no way to rank 0",
        r"client socket has (timed out|failed)|while trying to connect to \(|ECONNREFUSED|connection refused",
        "nothing answers at the address where the ranks meet: rank 0 is not up, the address or the port is another "
        "one, or a firewall is between",
        "check --rdzv-endpoint / MASTER_ADDR and MASTER_PORT on every machine; `lockstep doctor` on all of them tries "
        "the ports both ways",
    ),
    KnownError(
        "name does not resolve",
        r"name or service not known|name resolution|nodename nor servname|gaierror|no address associated with hostname",
        "the name of rank 0's machine is unknown on this machine",
        "use its IP address, or put the name into DNS or /etc/hosts of every machine",
    ),
    KnownError(
        "network unreachable",
        r"no route to host|network is unreachable|EHOSTUNREACH|ENETUNREACH",
        "this machine has no route to the other one: another network, an interface that is down, or IPv6 where only "
        "IPv4 is routed",
        "check `ip route get ADDRESS`; name the interface with GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME",
    ),
    KnownError(
        "ranks are missing",
        r"waiting for clients|\d+/\d+ clients joined|RendezvousTimeoutError",
        "fewer ranks came than WORLD_SIZE says, before the time was up",
        "start the same command on every machine, with the same --nnodes and --nproc-per-node",
    ),
    KnownError(
        "a key never came",
        r"wait timeout after \d+ ?ms, keys",
        "a rank waited for what another was to write into the store, and that rank failed or never started",
        "look at the first rank that failed; if none did, at the ranks that are missing",
        consequence=True,
    ),
    KnownError(
        "the rendezvous is closed",
        r"RendezvousClosedError",
        "the job that met under this --rdzv-id has ended, and a machine came too late",
        "start all machines again, with a new --rdzv-id",
    ),
    KnownError(
        "the environment is incomplete",
        r"environment variable \w+ expected, but not set",
        "init_process_group reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and no launcher set them",
        "start the script with `lockstep launch --nproc-per-node N SCRIPT`, or call lockstep.setup(), which needs none "
        "on one machine",
    ),
    KnownError(
        "RANK out of range",
        r"invalid rank \d+, rank should be in the interval|rank < size\. \d+ vs|is not below \w*WORLD_SIZE",
        "a rank's number is not below the number of ranks: often a machine's number is taken for a rank",
        "rank = node_rank × processes per node + local rank; let the launcher set it",
    ),
    KnownError(
        "world size mismatch",
        r"mismatch in world ?size|mesh should not be bigger than|world.?size should be less or equal|mesh .*world size",
        "the layout asks for another number of ranks than were started, or machines were told different numbers",
        "pipeline × replicate × shard must multiply to nnodes × nproc-per-node; use one command on all machines",
    ),
    KnownError(
        "joined twice",
        r"trying to initialize the default process group twice",
        "init_process_group was called where a process group exists already",
        "call it once; lockstep.setup() uses a group that exists",
    ),
    KnownError(
        "not joined",
        r"default process group has not been initialized",
        "a collective was called before the ranks met",
        "call lockstep.setup() (or make a Trainer) first",
    ),
    KnownError(
        "no MPI in torch",
        r"doesn't have MPI built in",
        "the wheels of torch are built without MPI",
        "distributed.backend: auto; mpirun works as a launcher with gloo and NCCL",
    ),
    KnownError(
        "no NCCL in torch",
        r"doesn't have NCCL built in",
        "this torch is a CPU build (or not for Linux)",
        "distributed.backend: auto takes gloo there; on GPUs install a CUDA build of torch",
    ),
    KnownError(
        "unknown backend",
        r"unknown backend type|invalid backend:|unknown c10d backend",
        "torch knows no backend of this name",
        "distributed.backend: auto (nccl on GPUs, gloo on CPUs)",
    ),
    KnownError(
        "unknown init method",
        r"no rendezvous handler for",
        "init_method is neither env:// nor tcp://HOST:PORT nor file://",
        "leave it out: the launcher knows the address",
    ),
    KnownError(
        "no such interface",
        r"unable to find (address|interface) for|unable to find interface",
        "GLOO_SOCKET_IFNAME names an interface that this machine does not have",
        "`ip -br addr` lists them; unset it, and Lockstep takes the one on the way to rank 0",
    ),
)

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
