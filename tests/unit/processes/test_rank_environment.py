"""Which rank a process is, under the variables that torchrun, Kubeflow, JobSet and MPI set."""

from __future__ import annotations

import pytest

from lockstep.processes.rank_environment import NodePlace, RankPlace, read_place, without_place

KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29501",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "7"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, RankPlace()),
        (TORCHRUN, RankPlace(5, 8, 1, "a", 7)),
        ({**KUBEFLOW, **TORCHRUN}, RankPlace(5, 8, 1, "a", 7)),  # a rank that torchrun started with PET_* as options
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, RankPlace(1, 2, 0, "a", 29500)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, RankPlace()),
        (KUBEFLOW, NodePlace(1, 2, "4", "job-node-0-0.job", 29501)),
        ({**KUBEFLOW, "PET_NPROC_PER_NODE": "1"}, RankPlace(1, 2, 0, "job-node-0-0.job", 29501)),
        ({**KUBEFLOW, "PET_NPROC_PER_NODE": "auto"}, NodePlace(1, 2, "auto", "job-node-0-0.job", 29501)),
        # Kubeflow's PyTorchJob also numbers machines with RANK.
        (
            {**KUBEFLOW, "RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "x"},
            NodePlace(1, 2, "4", "job-node-0-0.job", 29501),
        ),
        ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2"}, NodePlace(0, 1, "2")),
        (
            {"PET_NNODES": "2", "JOB_COMPLETION_INDEX": "1", "MASTER_ADDR": "first", "MASTER_PORT": "9"},
            RankPlace(1, 2, 0, "first", 9),
        ),
        ({**OPEN_MPI, "MASTER_ADDR": "first"}, RankPlace(3, 4, 1, "first", 29500)),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, RankPlace(3, 4, 1, "127.0.0.1", 29500)),
        (MPICH, RankPlace(1, 2, 1, "127.0.0.1", 29500)),
        ({**MPICH, "MPI_LOCALNRANKS": "1", "MASTER_ADDR": "first"}, RankPlace(1, 2, 1, "first", 29500)),
        (
            {"PMIX_RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "first"},
            RankPlace(1, 2, 0, "first", 29500),
        ),
    ],
)
def test_a_place_is_read(environment, expected):
    assert read_place(environment) == expected


def test_a_place_says_what_torch_reads():
    place = RankPlace(3, 4, 1, "first", 1234)
    assert read_place(place.variables()) == place
    options = "--nnodes 2 --node-rank 1 --nproc-per-node 4 --master-addr first --master-port 1234"
    assert " ".join(NodePlace(1, 2, "4", "first", 1234).torchrun_options()) == options
    assert " ".join(NodePlace(0, 1, "4").torchrun_options()) == "--standalone --nnodes 1 --nproc-per-node 4"


def test_a_child_is_not_taken_for_its_parent():
    inherited = {**KUBEFLOW, **TORCHRUN, "PATH": "/bin"}
    assert without_place(inherited) == {"PATH": "/bin"}


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"RANK": "1"}, "RANK is set, and WORLD_SIZE is not"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "set MASTER_ADDR"),
        ({**TORCHRUN, "RANK": "8"}, "RANK is 8, and there are 8 ranks"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK is '-1': give a whole number of at least 0"),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, "WORLD_SIZE is '0': give a whole number of at least 1"),
        ({**TORCHRUN, "LOCAL_RANK": "one"}, "LOCAL_RANK is 'one'"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "a port is at most 65535"),
        ({**KUBEFLOW, "PET_NODE_RANK": "2"}, "PET_NODE_RANK is 2, and there are 2 machines"),
        ({**KUBEFLOW, "PET_NPROC_PER_NODE": "many"}, "PET_NPROC_PER_NODE is 'many'"),
        ({"PET_NNODES": "2"}, "set PET_NODE_RANK"),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "0"}, "set PET_MASTER_ADDR"),
        ({"PET_NNODES": "1:4", "PET_NODE_RANK": "0"}, "PET_NNODES is '1:4'"),
        (OPEN_MPI, "mpirun does not say where that is: set MASTER_ADDR"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is not"),
        ({"PMI_RANK": "0"}, "PMI_SIZE is not"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2", "MASTER_ADDR": "a"}, "set LOCAL_RANK"),
        ({"PMIX_RANK": "0"}, "set it to the number of all ranks"),
        ({"JOB_COMPLETION_INDEX": "1"}, "set PET_NNODES to the number of pods"),
    ],
)
def test_what_is_not_enough_is_said(environment, sentence):
    with pytest.raises(ValueError, match=sentence):
        read_place(environment)
