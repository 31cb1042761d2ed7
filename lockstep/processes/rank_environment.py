"""Which rank this process is, from the variables of whoever started it: torchrun, Kubeflow, JobSet, MPI, or nobody.

The one place that turns them into RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, which torch reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

MASTER_PORT = 29500  # torchrun's, and that of Kubeflow's trainer
_THIS_MACHINE = "127.0.0.1"
Environment = Mapping[str, str]


@dataclass(frozen=True)
class RankPlace:
    """One process of a run. `local_rank` counts the ranks of its machine."""

    rank: int = 0
    num_ranks: int = 1
    local_rank: int = 0
    master_addr: str = _THIS_MACHINE
    master_port: int = MASTER_PORT

    def variables(self) -> dict[str, str]:
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.num_ranks),
            "LOCAL_RANK": str(self.local_rank),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


@dataclass(frozen=True)
class NodePlace:
    """One machine of a run, on which torchrun is to start `procs` ranks: a number, or auto, gpu or cpu."""

    node: int
    num_nodes: int
    procs: str
    master_addr: str = _THIS_MACHINE
    master_port: int = MASTER_PORT

    def torchrun_options(self) -> list[str]:
        if self.num_nodes == 1:
            return ["--standalone", "--nnodes", "1", "--nproc-per-node", self.procs]
        nodes = ["--nnodes", str(self.num_nodes), "--node-rank", str(self.node), "--nproc-per-node", self.procs]
        return [*nodes, "--master-addr", self.master_addr, "--master-port", str(self.master_port)]


Place = RankPlace | NodePlace


def read_place(environment: Environment) -> Place:
    """What the variables say; without any, the only rank. Raises ValueError where they do not say enough."""
    for read in _READERS:
        place = read(environment)
        if place is not None:
            return place
    return RankPlace()


def without_place(environment: Environment) -> dict[str, str]:
    """For processes that are told by other means which rank they are: of torchrun's options none is left either."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith("PET_") and name not in RankPlace().variables()
    }


def _from_torchrun(environment: Environment) -> Place | None:
    """Each rank has LOCAL_RANK. RANK without it counts machines where PET_NPROC_PER_NODE is another number than 1, as
    in Kubeflow's PyTorchJob, and ranks otherwise."""
    is_machine = "LOCAL_RANK" not in environment and environment.get("PET_NPROC_PER_NODE", "1") != "1"
    if "RANK" not in environment or is_machine:
        return None
    num_ranks = _required(environment, "WORLD_SIZE", "RANK", least=1)
    local_rank = _number(environment, "LOCAL_RANK") if "LOCAL_RANK" in environment else 0
    return _rank(environment, "RANK", num_ranks, local_rank, "torchrun", on_one_machine=False)


def _from_kubeflow(environment: Environment) -> Place | None:
    """Torchrun's options as variables, which Kubeflow's trainer sets for each machine; so do manifests of ours."""
    if "PET_NNODES" not in environment and "PET_NPROC_PER_NODE" not in environment:
        return None
    num_nodes = _number(environment, "PET_NNODES", least=1) if "PET_NNODES" in environment else 1
    index = next((name for name in ("PET_NODE_RANK", "JOB_COMPLETION_INDEX") if name in environment), None)
    if num_nodes > 1 and index is None:
        raise ValueError(
            f"PET_NNODES is {num_nodes}, and nothing says which of them this machine is: set PET_NODE_RANK, or make "
            "the Job Indexed"
        )
    return _node(environment, index, num_nodes)


def _from_open_mpi(environment: Environment) -> Place | None:
    if "OMPI_COMM_WORLD_RANK" not in environment:
        return None
    size = _required(environment, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", least=1)
    local_size = _optional(environment, "OMPI_COMM_WORLD_LOCAL_SIZE")
    local_rank = _local_rank(environment, "OMPI_COMM_WORLD_LOCAL_RANK", size)
    one = local_size == size
    return _rank(environment, "OMPI_COMM_WORLD_RANK", size, local_rank, "mpirun", on_one_machine=one)


def _from_pmi(environment: Environment) -> Place | None:
    """MPICH's and Intel's mpiexec."""
    if "PMI_RANK" not in environment:
        return None
    size = _required(environment, "PMI_SIZE", "PMI_RANK", least=1)
    one = _optional(environment, "MPI_LOCALNRANKS") == size
    local_rank = _local_rank(environment, "MPI_LOCALRANKID", size)
    return _rank(environment, "PMI_RANK", size, local_rank, "mpiexec", on_one_machine=one)


def _from_pmix(environment: Environment) -> Place | None:
    """PMIx says the rank, and the number of ranks only to those who speak its protocol."""
    if "PMIX_RANK" not in environment:
        return None
    size = _required(environment, "WORLD_SIZE", "PMIX_RANK", least=1)
    local_rank = _local_rank(environment, "LOCAL_RANK", size)
    return _rank(environment, "PMIX_RANK", size, local_rank, "the launcher", on_one_machine=False)


def _from_job_index(environment: Environment) -> Place | None:
    """Kubernetes numbers the pods of an Indexed Job, which JobSet makes, and does not tell them how many they are."""
    if "JOB_COMPLETION_INDEX" not in environment:
        return None
    raise ValueError(
        f"this is pod {environment['JOB_COMPLETION_INDEX']} of an Indexed Job, and nothing says of how many: set "
        "PET_NNODES to the number of pods, PET_NPROC_PER_NODE to the ranks of each and MASTER_ADDR to the first pod"
    )


# The first that knows decides: what started this process itself comes before what started its machine.
_READERS: tuple[Callable[[Environment], Place | None], ...] = (
    _from_torchrun,
    _from_kubeflow,
    _from_open_mpi,
    _from_pmi,
    _from_pmix,
    _from_job_index,
)


def _rank(
    environment: Environment, name: str, num_ranks: int, local_rank: int, starter: str, *, on_one_machine: bool
) -> RankPlace:
    rank = _number(environment, name)
    if rank >= num_ranks:
        raise ValueError(f"{name} is {rank}, and there are {num_ranks} ranks: they are numbered from 0")
    address = environment.get("MASTER_ADDR") or (_THIS_MACHINE if on_one_machine or num_ranks == 1 else "")
    if not address:
        raise ValueError(
            f"{num_ranks} ranks must meet at rank 0, and {starter} does not say where that is: set MASTER_ADDR to the "
            "name of its machine for every rank"
        )
    return RankPlace(rank, num_ranks, local_rank, address, _port(environment, "MASTER_PORT"))


def _node(environment: Environment, index: str | None, num_nodes: int) -> Place:
    node = _number(environment, index) if index is not None else 0
    if node >= num_nodes:
        raise ValueError(f"{index} is {node}, and there are {num_nodes} machines: they are numbered from 0")
    procs = environment.get("PET_NPROC_PER_NODE", "1")
    if procs not in ("auto", "gpu", "cpu"):
        procs = str(_number(environment, "PET_NPROC_PER_NODE", least=1)) if procs != "1" else procs
    address = environment.get("PET_MASTER_ADDR") or environment.get("MASTER_ADDR") or ""
    if num_nodes > 1 and not address:
        raise ValueError(
            f"{num_nodes} machines must meet at the first of them, and nothing says where that is: set PET_MASTER_ADDR"
        )
    port_name = "PET_MASTER_PORT" if "PET_MASTER_PORT" in environment else "MASTER_PORT"
    address, port = address or _THIS_MACHINE, _port(environment, port_name)
    if procs == "1":
        return RankPlace(node, num_nodes, 0, address, port)
    return NodePlace(node, num_nodes, procs, address, port)


def _port(environment: Environment, name: str) -> int:
    port = _number(environment, name, least=1) if name in environment else MASTER_PORT
    if port > 65535:
        raise ValueError(f"the variable {name} is {port}: a port is at most 65535")
    return port


def _required(environment: Environment, name: str, beside: str, *, least: int = 0) -> int:
    if name not in environment:
        raise ValueError(f"{beside} is set, and {name} is not: set it to the number of all ranks")
    return _number(environment, name, least=least)


def _optional(environment: Environment, name: str) -> int:
    return _number(environment, name) if name in environment else 0


def _local_rank(environment: Environment, name: str, num_ranks: int) -> int:
    """Ranks that took the same number would share a GPU."""
    known = next((key for key in (name, "LOCAL_RANK") if key in environment), None)
    if known is None and num_ranks > 1:
        raise ValueError("nothing says which of the ranks of its machine this one is: set LOCAL_RANK, from 0")
    return _number(environment, known) if known is not None else 0


def _number(environment: Environment, name: str, *, least: int = 0) -> int:
    text = environment[name]
    if not (text.isascii() and text.isdecimal()) or int(text) < least:
        raise ValueError(f"the variable {name} is {text!r}: give a whole number of at least {least}")
    return int(text)
