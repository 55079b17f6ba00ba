"""Malicious checkpoints, and other users of the machine, cannot harm processes that read or save checkpoints."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config

from oslo_models import GPT2LMHeadModel
from oslo_models.auto import AutoModelForCausalLM
from oslo_models.checkpoint import CheckpointError, atomic_commit, open_checkpoint, recover, verify_checkpoint
from oslo_models.cli.convert import convert
from oslo_models.cli.main import inspect_checkpoint, main
from oslo_models.distributed.mesh import ParallelMesh

from support.checkpoints import ALONE, MANIFEST, assert_holds, model, save, tiny_gpt2
from support.pool import Pool

JOURNAL = ".oslo_journal"
NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs files of two users")


def snapshot(folder: Path) -> dict[str, Any]:
    """Return all names, links and contents of a folder."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(folder))] = (status.st_mode, status.st_uid, status.st_mtime_ns, content)
    return found


def write_manifest(path: Path, **content: Any) -> None:
    content = {"format_version": 1, "versions": {}, "variant": None, "tensors": {}, **content}
    content["checksum"] = zlib.crc32(json.dumps(content, sort_keys=True).encode())
    path.write_text(json.dumps(content))


def interrupted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save a checkpoint of generation 0; interrupt the save of generation 1 after its commit."""
    save("split", folder)
    (folder / "runs").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(atomic_commit, "finish_interrupted_save", lambda *_: None)
        save("merged", folder, generation=1)
    assert (folder / JOURNAL / MANIFEST).exists() and (folder / "pytorch_model_tp=0_pp=0.bin").exists()


def test_readers_see_an_interrupted_save_and_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(tmp_path / "x", monkeypatch)
    before = snapshot(tmp_path)
    reader = open_checkpoint(tmp_path / "x")
    verify_checkpoint(reader, ALONE)
    assert_holds(reader, model(generation=1)[0], frozenset(["head.weight"]))
    assert inspect_checkpoint(tmp_path / "x", verify=True)["files"].keys() == {"model.safetensors"}
    assert snapshot(tmp_path) == before
    assert main(["recover", str(tmp_path / "x")]) == 0
    assert not (tmp_path / "x" / JOURNAL).exists() and not list((tmp_path / "x").glob("pytorch_model*"))
    assert_holds(open_checkpoint(tmp_path / "x"), model(generation=1)[0], frozenset(["head.weight"]))
    assert not recover(tmp_path / "x")


def test_a_reader_sees_a_whole_checkpoint_wherever_moving_files_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(tmp_path / "x", monkeypatch)
    (tmp_path / "x" / "pytorch_model_tp=0_pp=0.bin").unlink()
    os.replace(tmp_path / "x" / JOURNAL / "model.safetensors", tmp_path / "x" / "model.safetensors")
    before = snapshot(tmp_path)
    assert_holds(open_checkpoint(tmp_path / "x"), model(generation=1)[0], frozenset(["head.weight"]))
    assert snapshot(tmp_path) == before


def test_the_next_save_finishes_an_interrupted_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(tmp_path / "x", monkeypatch)
    save("merged", tmp_path / "x", generation=2)
    assert not (tmp_path / "x" / JOURNAL).exists()
    assert_holds(open_checkpoint(tmp_path / "x"), model(generation=2)[0], frozenset(["head.weight"]))


def test_models_load_configuration_and_weights_through_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for layers in (1, 2):
        config = GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_head=2, n_layer=layers, bos_token_id=0)
        (tmp_path / "x" / "runs").mkdir(parents=True, exist_ok=True)
        with monkeypatch.context() as patch:
            if layers == 2:
                patch.setattr(atomic_commit, "finish_interrupted_save", lambda *_: None)
            made: Any = GPT2LMHeadModel.from_config_with_parallel(config, seed=layers)
            made.save_pretrained_with_parallel(tmp_path / "x", save_with_merging=True)
    before = snapshot(tmp_path)
    for cls in (GPT2LMHeadModel, AutoModelForCausalLM):
        loaded: Any = cls.from_pretrained_with_parallel(tmp_path / "x")
        assert loaded.config.n_layer == 2
        assert torch.equal(loaded.transformer.wte.weight, made.transformer.wte.weight)
    assert snapshot(tmp_path) == before


# Journals of others ---------------------------------------------------------------------------------------------------


def link_to_a_folder(bad: Path, home: Path) -> None:
    (bad / "extra").symlink_to(home)
    (bad / JOURNAL / "extra").mkdir(parents=True)
    (bad / JOURNAL / "extra" / "keys").write_text("attacker")
    write_manifest(bad / JOURNAL / MANIFEST, files={"model.safetensors": {"size": 0, "crc32": 0}})


def whole_journal_with_a_link_to_a_folder(bad: Path, home: Path) -> None:
    link_to_a_folder(bad, home)
    (bad / JOURNAL / "model.safetensors").touch()


def journal_is_a_link(bad: Path, home: Path) -> None:
    write_manifest(home / MANIFEST, files={"keys": {"size": 4, "crc32": zlib.crc32(b"mine")}})
    (bad / JOURNAL).symlink_to(home)


def journal_is_a_file(bad: Path, home: Path) -> None:
    (bad / JOURNAL).write_text("")


def files_are_links(bad: Path, home: Path) -> None:
    (bad / JOURNAL).mkdir()
    (bad / JOURNAL / "config.json").symlink_to(home / "keys")
    write_manifest(bad / JOURNAL / MANIFEST, files={"config.json": {"size": 4, "crc32": 0}})


def manifest_is_a_link(bad: Path, home: Path) -> None:
    (bad / JOURNAL).mkdir()
    write_manifest(home / "other.json", files={"keys": {"size": 4, "crc32": 0}})
    (bad / JOURNAL / MANIFEST).symlink_to(home / "other.json")


def names_lead_out(bad: Path, home: Path) -> None:
    (bad / JOURNAL).mkdir()
    write_manifest(bad / JOURNAL / MANIFEST, files={"../home/keys": {"size": 4, "crc32": zlib.crc32(b"mine")}})


def good_weights_go(bad: Path, home: Path) -> None:
    (bad / JOURNAL).mkdir()
    write_manifest(bad / JOURNAL / MANIFEST, files={"other.safetensors": {"size": 4, "crc32": 0}})


def good_weights_go_for_nothing(bad: Path, home: Path) -> None:
    (bad / JOURNAL).mkdir()
    write_manifest(bad / JOURNAL / MANIFEST, files={})


def a_fifo(bad: Path, home: Path) -> None:
    (bad / JOURNAL).mkdir()
    os.mkfifo(bad / JOURNAL / MANIFEST)


def of_another_user(bad: Path, home: Path) -> None:
    (bad / JOURNAL).mkdir()
    (bad / JOURNAL / "x.json").write_text("{}")
    write_manifest(bad / JOURNAL / MANIFEST, files={"x.json": {"size": 2, "crc32": zlib.crc32(b"{}")}})
    os.chown(bad / JOURNAL, NOBODY, NOBODY)


JOURNALS = [
    link_to_a_folder,
    journal_is_a_link,
    journal_is_a_file,
    files_are_links,
    manifest_is_a_link,
    names_lead_out,
    good_weights_go,
    good_weights_go_for_nothing,
    a_fifo,
    pytest.param(of_another_user, marks=as_root),
]


@pytest.mark.parametrize("prepare", JOURNALS)
def test_journals_of_others_are_refused_and_nothing_changes(
    tmp_path: Path, prepare: Callable[[Path, Path], None]
) -> None:
    bad, home = tmp_path / "bad", tmp_path / "home"
    save("merged", bad)
    home.mkdir()
    (home / "keys").write_text("mine")
    prepare(bad, home)
    before = snapshot(tmp_path)
    for act in (
        lambda: open_checkpoint(bad),
        lambda: inspect_checkpoint(bad),
        lambda: GPT2LMHeadModel.from_pretrained_with_parallel(bad),
        lambda: recover(bad),
        lambda: save("merged", bad),
    ):
        with pytest.raises(OSError, match=r"\.oslo_journal"):
            act()
        assert snapshot(tmp_path) == before


@pytest.mark.parametrize("prepare", JOURNALS)
def test_commands_that_read_name_the_journal_and_change_nothing(
    tmp_path: Path, prepare: Callable[[Path, Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands with an output folder do not begin it."""
    bad, home, out = tmp_path / "bad", tmp_path / "home", tmp_path / "out"
    tiny_gpt2().save_pretrained(bad)
    home.mkdir()
    (home / "keys").write_text("mine")
    prepare(bad, home)
    before = snapshot(tmp_path)
    commands = [["inspect", bad], ["merge", bad, out], ["verify", bad, "--tensor-parallel-size", 2], ["plan", bad]]
    for command in commands:
        assert main([str(each) for each in command]) == 2
        assert JOURNAL in capsys.readouterr().err, command
        assert snapshot(tmp_path) == before, command
    with pytest.raises(OSError, match=r"\.oslo_journal"):  # what each process of the command reshard does
        convert(bad, out)
    assert snapshot(tmp_path) == before


def test_recovery_does_not_write_through_links_beside_the_journal(tmp_path: Path) -> None:
    bad, home = tmp_path / "bad", tmp_path / "home"
    save("merged", bad)
    home.mkdir()
    (home / "keys").write_text("mine")
    whole_journal_with_a_link_to_a_folder(bad, home)
    with pytest.raises(OSError, match="interrupted"):
        recover(bad)
    assert (home / "keys").read_text() == "mine"


@pytest.mark.parametrize(
    "files", [{"../x": {"size": 1, "crc32": 1}}, {"a/b": {"size": 1, "crc32": 1}}, {"a": {"size": "1"}}, {"a": 1}, []]
)
def test_manifests_that_are_not_of_a_save_are_refused(tmp_path: Path, files: Any) -> None:
    save("merged", tmp_path)
    write_manifest(tmp_path / MANIFEST, files=files)
    with pytest.raises(CheckpointError, match="oslo_manifest"):
        open_checkpoint(tmp_path)


def test_malformed_tables_of_tensors_are_checkpoint_errors(tmp_path: Path) -> None:
    save("split", tmp_path)
    good = json.loads((tmp_path / MANIFEST).read_text())
    name = "pytorch_model_tp=0_pp=0.bin"
    for wrong in (
        {"w": {}},
        {"w": []},
        {"w": {"ranges": [], "shape": [1], "dim": None, "stages": [9], "dtype": "float32"}},
        {"w": {"ranges": [], "shape": [1], "dim": None, "stages": [0], "dtype": "load"}},
    ):
        write_manifest(tmp_path / MANIFEST, files={name: good["files"][name]}, tensors=wrong)
        with pytest.raises(CheckpointError, match="describes tensors that its files cannot have"):
            open_checkpoint(tmp_path)


def test_a_number_in_a_name_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model_tp=999999999_pp=999999999.bin").touch()
    with pytest.raises(FileNotFoundError, match="missing"):
        open_checkpoint(tmp_path)


# Copies on hosts ------------------------------------------------------------------------------------------------------


def opens_own_copy(base: Path) -> None:
    mesh = ParallelMesh(2)
    reader = open_checkpoint(base / f"host{mesh.world.rank}")
    try:
        verify_checkpoint(reader, mesh.world)
    finally:
        reader.close()


@pytest.mark.parametrize("damaged", [0, 1])
def test_a_damaged_copy_of_one_host_is_named_on_all_ranks(tmp_path: Path, pool: Pool, damaged: int) -> None:
    save("merged", tmp_path / "host0", max_shard_size=100)
    shutil.copytree(tmp_path / "host0", tmp_path / "host1")
    pool.run(2, opens_own_copy, tmp_path)
    for file in sorted((tmp_path / "host1").glob("model-*.safetensors"))[damaged::2]:
        data = bytearray(file.read_bytes())
        data[-3] ^= 0x40
        file.write_bytes(data)
    errors = pool.run(2, opens_own_copy, tmp_path, expect=CheckpointError)
    assert all("host1/model-" in str(error) and os.uname().nodename in str(error) for error in errors)


# Folders of other users -----------------------------------------------------------------------------------------------


@as_root
@pytest.mark.parametrize("moment", ["at once", "before the exchange"])
def test_saving_into_the_folder_of_another_user_gives_nothing_away(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice, secret = tmp_path / "alice", tmp_path / "secret"
    (alice / "ckpt").mkdir(parents=True)
    secret.mkdir(mode=0o700)
    for path in (alice, alice / "ckpt"):
        os.chown(path, NOBODY, NOBODY)

    def swap(staging: Path) -> None:
        os.rename(staging, f"{staging}.away")
        staging.symlink_to(secret)

    if moment == "at once":

        def files(folder: Path) -> None:
            (staging,) = alice.glob(".ckpt.saving-*")
            swap(staging)
            (folder / "config.json").write_text("{}")

        with pytest.raises(OSError, match="was exchanged by another process"):
            save("merged", alice / "ckpt", files=files)
    else:
        copy_status = atomic_commit._copy_status

        def swapped(source: int, target: int) -> None:
            (staging,) = alice.glob(".ckpt.saving-*")
            swap(staging)
            copy_status(source, target)

        monkeypatch.setattr(atomic_commit, "_copy_status", swapped)
        with pytest.raises(OSError, match="was exchanged by another process"):
            save("merged", alice / "ckpt")
    assert secret.stat().st_uid == 0 and secret.stat().st_mode & 0o777 == 0o700 and not list(secret.iterdir())


@as_root
def test_saving_keeps_the_owner_and_mode_of_a_folder(tmp_path: Path) -> None:
    save("merged", tmp_path / "x")
    os.chown(tmp_path / "x", NOBODY, NOBODY)
    (tmp_path / "x").chmod(0o750)
    save("merged", tmp_path / "x", generation=1)
    status = (tmp_path / "x").stat()
    assert (status.st_uid, status.st_gid, status.st_mode & 0o777) == (NOBODY, NOBODY, 0o750)


# Entries of .bin files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("w", torch.eye(3).to_sparse()),
        ("w", torch.empty(3, device="meta")),
        (5, torch.zeros(1)),
        ("w", torch.ones(1, dtype=torch.complex64).conj().imag),
        ("transformer.ln_f.weight", torch.ones(48, dtype=torch.complex64)),
        ("w", torch.zeros(1).expand(1 << 40)),
    ],
    ids=["sparse", "meta", "number", "negated", "complex", "one number for many"],
)
def test_unusual_entries_of_bin_files_are_named(tmp_path: Path, name: Any, entry: torch.Tensor) -> None:
    reference = tiny_gpt2()
    reference.config.save_pretrained(tmp_path)
    if name == "transformer.ln_f.weight":
        entry = torch.ones(reference.config.n_embd, dtype=torch.complex64)
    torch.save({**reference.state_dict(), name: entry}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=rf"pytorch_model\.bin.*the entry {name!r}"):
        GPT2LMHeadModel.from_pretrained_with_parallel(tmp_path)


def test_a_deep_index_is_a_checkpoint_error(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=r"index\.json: expected an index"):
        open_checkpoint(tmp_path)
