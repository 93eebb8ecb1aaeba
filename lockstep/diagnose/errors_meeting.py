"""Known errors of ranks that don't meet: addresses, ports, names, numbers of ranks."""

from lockstep.diagnose.entry import KnownError

MEETING = (
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
        "the name of the machine of rank 0 means nothing on this machine",
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
        "a rank waited for what another was to write into the store, and that one failed or never came",
        "look at the first rank that failed; if none did, at the ranks that are missing",
        consequence=True,
    ),
    KnownError(
        "the meeting is closed",
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
