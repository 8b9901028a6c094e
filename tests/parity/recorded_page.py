"""The scripts of docs/prove-your-run.md one after another, as one of ``WORLD_SIZE`` processes.

``python recorded_page.py FOLDER`` runs all files ``*.py`` of the folder, by name. They are executed
in this process, so that libraries are imported once; the process group is one for all of them.
"""

import logging
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    warnings.simplefilter("ignore")  # of the libraries
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    folder, rank, size = Path(sys.argv[1]), os.environ["RANK"], os.environ["WORLD_SIZE"]
    place = {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": "0", "NODE_RANK": "0"}
    os.environ.update(place, MASTER_ADDR="127.0.0.1", MASTER_PORT="1", TORCHELASTIC_RUN_ID="page")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=int(size)
    )
    for name in ("init_process_group", "destroy_process_group"):
        setattr(dist, name, lambda *_, **__: None)
    for script in sorted(folder.glob("*.py")):
        os.environ["LOCKSTEP_RECORD"] = str(folder / script.stem)
        exec(compile(script.read_text(), script.name, "exec"), {"__name__": "__main__"})
    sys.stdout.flush()
    os._exit(0)  # see ``recorded_loops``


if __name__ == "__main__":
    main()
