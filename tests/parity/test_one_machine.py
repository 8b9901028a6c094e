"""TF_CONFIG as in TensorFlow's tutorials: all workers are this machine, and no secret is set."""

from pathlib import Path

import pytest

from tests.launchers import BEGINNING, lines_of_all, on_loopback

SECONDS = 120.0

SCRIPT = f"""{BEGINNING}
torch.manual_seed(0)
trainer = lockstep.Trainer(
    nn.Linear(4, 3), loss=nn.MSELoss(), optimizer=torch.optim.SGD,
    strategy=lockstep.MultiWorkerMirroredStrategy(timeout_seconds=60))
generator = torch.Generator().manual_seed(1)
data = torch.randn(8, 4, generator=generator), torch.randn(8, 3, generator=generator)
trainer.fit(data, batch_size=4, verbose=0)
tell([trainer.plan.num_hosts, trainer.model.weight.tolist()])
"""


@pytest.mark.fresh
@pytest.mark.thorough
def test_workers_at_this_machines_addresses_need_no_secret(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    variables = {"LOCKSTEP_SECRET": None, "XDG_STATE_HOME": str(tmp_path / "state")}
    with on_loopback([str(script)], variables=variables) as processes:
        (first,), (second,) = lines_of_all(processes, SECONDS)
    assert first == second
    assert first[0] == 2
    assert (tmp_path / "state" / "lockstep" / "secret").is_file()
