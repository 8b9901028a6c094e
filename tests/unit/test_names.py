"""The rules of the house: folders and files stay small, and retired words stay retired."""

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

import lockstep

ROOT = Path(lockstep.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# Names that meant several things, or nothing outside of this project, and what replaced them.
RETIRED = {
    "Abroad": "Connections",
    "Backups": "Copies",
    "CheckpointRunner": "KerasCheckpoints",
    "Conductor": "TaskDriver",
    "Connected": "HostChannels",
    "Directive": "CallbackOutcome",
    "Ensemble": "RankSync",
    "Feed": "DataPipeline",
    "FittingRunner": "Fit",
    "Footing": "CallSignature",
    "Form": "ModelLayout",
    "Keeper": "CheckpointWriter",
    "KeepingRunner": "KerasCheckpoints",
    "Look": "ModelFingerprint",
    "Lookout": "ModelSnapshotter, CompiledModelFingerprinter or LoopWatchdog",
    "News": "CallUpdate or BatchHeader",
    "Notes": "InstructionLog",
    "Origin": "HelperHandle",
    "Pace": "OverheadBudget",
    "Part": "WorkItem",
    "PartedCopy": "PartitionedCopy",
    "PartedFile": "PartitionedFile",
    "Peer": "PeerProcess or RemotePeer",
    "PersistentRunner": "TrainerState",
    "ProvingRunner": "Runner.plan_for",
    "Recipe": "UpdateConfig",
    "Renew": "RestartTask",
    "Residuals": "ErrorFeedback",
    "ResumingRunner": "FitCheckpoints",
    "ReturningConductor": "RestartingDriver",
    "Seat": "PlacedDevice",
    "Seats": "Placement",
    "Seen": "DryRunResult",
    "ServedStand": "ServerProgress",
    "Sight": "ModelFingerprint",
    "SlotNotes": "SlotJournal",
    "Stand": "QueueProgress",
    "Standing": "CachedCall",
    "StandingCalls": "CallCache",
    "Standstill": "StoppedProcessTimer",
    "StepTracer": "StepProfiler",
    "StreamedMemory": "OffloadedMemory",
    "Streaming": "ParameterOffload",
    "WideBoard": "MultiHostBoard",
    "Wish": "DataOptions",
    "abroad": "remote_hosts or connections",
    "bind_again": "rebind",
    "can_read_aside": "can_prefetch",
    "check_apart": "check_local_sgd or check_sample_independence",
    "check_served": "check_parameter_server",
    "conductor": "driver",
    "consult": "sync_callback",
    "ensemble": "rank_sync",
    "forget_blanks": "clear_meta",
    "goes_on": "is_restart",
    "has_local_steps": "local_steps",
    "held_names": "local_names",
    "is_aside": "is_rank_zero_only",
    "keeper": "writer",
    "keeps_pace": "is_synchronous",
    "look_again": "reload_weights",
    "lookout": "snapshotter or watchdog",
    "may_stand": "is_cacheable",
    "read_aside": "prefetch",
    "nameless_file": "anonymous_file",
    "recipe": "update_config",
    "ruled_buffers": "authoritative_buffers",
    "stand_at": "record_position",
    "take_stand": "record_progress",
    "takes_whole": "uses_whole_batch",
    "told": "gathered",
    "told_elsewhere": "counted_elsewhere",
    "trains_apart": "is_local_sgd",
    "when_complete": "on_grad_ready",
    "wish": "options",
}


def names_in(path: Path) -> set[str]:
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return {token.string.lstrip("_") for token in tokens if token.type == tokenize.NAME}


def test_a_folder_has_at_most_15_modules() -> None:
    modules = Counter(path.parent for path in FILES if path.stem != "__init__")
    assert {str(folder): number for folder, number in modules.items() if number > 15} == {}


def test_no_module_has_the_name_of_its_folder() -> None:
    assert [str(path) for path in FILES if path.stem == path.parent.name] == []


def test_no_file_has_more_than_450_lines() -> None:
    lengths = {str(path): path.read_text().count("\n") for path in FILES}
    assert {name: length for name, length in lengths.items() if length > 450} == {}


def test_every_folder_says_what_it_is() -> None:
    folders = {path: ast.parse(path.read_text()) for path in FILES if path.stem == "__init__"}
    assert [str(path) for path, code in folders.items() if not ast.get_docstring(code)] == []


def test_retired_names_are_gone() -> None:
    found = {str(path.relative_to(ROOT)): names_in(path) & set(RETIRED) for path in FILES}
    assert {name: sorted(words) for name, words in found.items() if words} == {}


def test_the_glossary_is_short_and_has_no_retired_word() -> None:
    page = (ROOT.parent / "docs" / "glossary.md").read_text()
    words = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")][1:]
    assert len(words) <= 70
    assert {word.lower() for word in words} & {name.lower() for name in RETIRED} == set()
