"""Several hosts by TF_CONFIG: two processes train an MLP of 784-128-10 as one would.

If TF_CONFIG is set, this program is one of the hosts: start it on each of them, with a file of the
same secret (`LOCKSTEP_SECRET_FILE`). Otherwise it starts two such processes here, and compares
their weights with those of one device.

    python multi_worker.py [folder of MNIST]
"""

import lockstep  # before Keras: it chooses Keras's PyTorch backend

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile

import digits
import keras
import numpy as np

(x, y), test = digits.load()


def train(strategy):
    """The model, trained."""
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((28, 28)),
                keras.layers.Flatten(),
                keras.layers.Dense(128, activation="relu"),
                keras.layers.Dense(10, activation="softmax"),
            ]
        )
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(x, y, batch_size=64, epochs=5, validation_split=0.1, verbose=2)
    return model


def be_a_host():
    """The training on each host. All return the same values; only host 0 shows progress."""
    strategy = lockstep.MultiWorkerMirroredStrategy(devices_per_host=1)
    model = train(strategy)
    loss, accuracy = model.evaluate(*test, verbose=0)
    replicas = strategy.num_replicas_in_sync  # all hosts call it
    if strategy.is_chief:
        print(f"{replicas} replicas: loss {loss:.3f}, accuracy {accuracy:.3f}")
        assert accuracy > 0.85, "the digits were not learnt"
        model.save_weights(os.environ["WEIGHTS"])


def start_two_hosts(weights):
    """Start two processes on this machine, each with its own address."""
    workers = [f"{address}:{free_port(address)}" for address in ("127.0.0.1", "127.0.0.2")]
    job = {"WEIGHTS": weights, "LOCKSTEP_SECRET": secrets.token_hex(32)}
    processes = []
    for index in range(2):
        config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
        environment = {**os.environ, **job, "TF_CONFIG": json.dumps(config)}
        processes.append(subprocess.Popen([sys.executable, *sys.argv], env=environment))
    assert [process.wait() for process in processes] == [0, 0], "a host has failed"


def free_port(address):
    """A free port."""
    with socket.create_server((address, 0)) as server:
        return server.getsockname()[1]


if "TF_CONFIG" in os.environ:
    be_a_host()
else:
    with tempfile.TemporaryDirectory() as folder:
        start_two_hosts(weights := f"{folder}/two.weights.h5")
        model = train(lockstep.SingleDeviceStrategy())
        alone = model.get_weights()
        model.load_weights(weights)
    pairs = zip(alone, model.get_weights(), strict=True)
    distance = max(np.abs(one - other).max() for one, other in pairs)
    print(f"two hosts and one device differ by {distance:.1e} at most")
    assert distance < 1e-4
