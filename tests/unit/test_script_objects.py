"""What scripts define and hold arrives in helpers; what cannot be sent is named."""

import ast
import os
import runpy
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.errors import ShippingError
from lockstep.parallel.transfer.serialization import pack, unpack

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated")

ODD_MODULES = {
    "__init__.py": """
import contextvars, importlib, threading, types
from . import again
lock, variable = threading.Lock(), contextvars.ContextVar("variable")

class Loader:  # as Keras's
    def __init__(self, name):
        self.name, self.module = name, None
    def __getattr__(self, name):
        if self.module is None:
            self.module = importlib.import_module(self.name)
        return getattr(self.module, name)

class Moved(types.ModuleType):  # as six's
    inner = types.ModuleType("odd_modules.moved_inner")
    inner.value, inner.lock = 5, lock
moved = Moved("odd_modules.moved")
import sys
sys.modules["odd_modules.moved"] = moved
""",
    "lazy.py": """
import sys, threading, types

class Lazy(types.ModuleType):  # as transformers'
    lock = threading.Lock()
    def __getattr__(self, name):
        if name != "value":
            raise AttributeError(name)
        return 7
    def __reduce__(self):
        return Lazy, ("a copy that knows nothing",)
sys.modules[__name__] = Lazy(__name__)
sys.modules[__name__].__spec__ = __spec__
sys.modules[__name__].__file__ = __file__
""",
    "settings.py": """
import sys, threading

class Settings:
    def __init__(self):
        self.rate, self.lock = 0.5, threading.Lock()
        self.__name__, self.__file__ = __name__, __file__
sys.modules[__name__] = Settings()
""",
    "again.py": """
def double(x):
    return 2 * x
class Doubler:
    def __call__(self, x):
        return double(x)
""",
    "sub/__init__.py": "",
    "sub/json.py": "def here(): return 'here'",
}


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    home = tmp_path_factory.mktemp("home")
    for name, source in ODD_MODULES.items():
        path = home / "odd_modules" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(home)
        file = Path(__file__).with_name("script_objects.py")
        yield runpy.run_path(str(file), run_name="__main__")
    for name in [name for name in sys.modules if name.partition(".")[0] == "odd_modules"]:
        del sys.modules[name]


def fit(loss: Any, data: Any = None) -> None:
    trainer = lockstep.Trainer(
        nn.Linear(2, 1),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        strategy=lockstep.MirroredStrategy(devices=2),
    )
    data = (torch.ones(4, 2), torch.ones(4, 1)) if data is None else data
    trainer.fit(data, batch_size=4, verbose=0)


def test_what_scripts_hold_arrives(script: dict[str, Any], tmp_path: Path) -> None:
    """Each object is unpacked and used in a helper, within a loss."""
    sent: dict[str, tuple[bytes, Any]] = {}
    for name, make in script["CASES"].items():
        obj, use = make()
        sent[name] = pack((obj, use)).payload, repr(use(obj))
    here, report = os.getpid(), tmp_path / "report"

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if os.getpid() != here and not report.exists():
            report.write_text(repr({name: outcome(*each) for name, each in sent.items()}))
        return (output - target).square().mean()

    def outcome(payload: bytes, wanted: str) -> str:
        try:
            found, use = unpack(payload, None)
            got = repr(use(found))
        except Exception as error:
            got = "".join(traceback.format_exception(error))
        return "same" if got == wanted else f"{got}, and not {wanted}"

    fit(loss)
    assert ast.literal_eval(report.read_text()) == dict.fromkeys(script["CASES"], "same")


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda script: (script["with_lock"],), "`lock` of the loss"),
        (lambda script: (nn.MSELoss(), script["Locked"]()), r"\['file'\] of `parts` of `dataset`"),
        (lambda script: (script["numbers"](),), "`pending` of the function of the loss"),
    ],
)
def test_what_cannot_be_sent_is_named(script: dict[str, Any], make: Any, named: str) -> None:
    with pytest.raises(ShippingError, match=f"(?i){named}"):
        fit(*make(script))
