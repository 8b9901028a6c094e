"""Scripts that come from tf.distribute find what is there, and else what to write."""

import copy
import pickle

import numpy as np
import pytest

import lockstep
from lockstep.errors import OptionError


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("run", "train_step.*lockstep.init"),
        ("reduce", "lockstep.all_mean"),
        ("gather", "lockstep.all_mean"),
        ("distribute_datasets_from_function", "lockstep.share"),
        ("cluster_resolver", "is_chief"),
    ],
)
def test_names_that_are_not_there(name: str, said: str) -> None:
    strategy = lockstep.MirroredStrategy(2)
    with pytest.raises(OptionError, match=rf"(?s)MirroredStrategy\.{name}.*{said}"):
        getattr(strategy, name)
    assert not hasattr(strategy, name)


def test_any_other_name() -> None:
    strategy = lockstep.SingleDeviceStrategy()
    with pytest.raises(AttributeError, match="'SingleDeviceStrategy' object has no attribute 'x'"):
        strategy.x  # noqa: B018
    assert copy.deepcopy(strategy).num_replicas_in_sync == 1
    assert pickle.loads(pickle.dumps(strategy)).num_replicas_in_sync == 1


def test_a_distributed_dataset_is_the_dataset() -> None:
    data = np.zeros((4, 2))
    assert lockstep.MirroredStrategy(2).experimental_distribute_dataset(data) is data
