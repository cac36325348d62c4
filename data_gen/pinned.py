"""Data sets of the Hub at fixed commits, also where a mixture names a branch, a tag or the start of a commit."""

import logging
import re
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi

from keepsight.data_gen.shards import Manifest
from keepsight.files import read_json

logger = logging.getLogger("keepsight")

_COMMIT = re.compile(r"(.*@)?[0-9a-f]{40}")
_START = re.compile(r"[0-9a-f]{7,39}")  # as the Hub's pages show commits; its files are fetched by whole ones alone
_SECONDS = 20.0


def pinned(mixture: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A mixture whose data sets of the Hub are named by a commit: `main` becomes `main@COMMIT`, and so does `48e268d`.

    Args:
        mixture: As plain values, found right.
        folder: Where the data is made. The commits of data that is there, of a run to be resumed, stay.

    Returns:
        The mixture. A revision stays a branch or tag, with a warning, where the Hub does not say its commit.

    Raises:
        UserError: the folder's manifest is damaged.
    """
    manifest = folder / "manifest.json"
    before = read_json(manifest, Manifest).settings.mixture["sources"] if manifest.exists() else []
    return {**mixture, "sources": [_pinned(source, before) for source in mixture["sources"]]}


def commit_of(revision: str) -> str:
    """What the Hub is asked for: the commit of `main@COMMIT`, or the revision itself."""
    return revision.rpartition("@")[2] if _COMMIT.fullmatch(revision) else revision


def _pinned(source: dict[str, Any], before: list[dict[str, Any]]) -> dict[str, Any]:
    revision = source.get("revision", "main")
    if source["kind"] != "hub_dataset" or Path(source["id"]).is_dir() or _COMMIT.fullmatch(revision):
        return source
    known = (each["revision"] for each in before if each.get("id") == source["id"] and "revision" in each)
    same = (each for each in known if each == revision or each.startswith(f"{revision}@"))
    return {**source, "revision": next(same, None) or _asked(source["id"], revision)}


def _asked(name: str, revision: str) -> str:
    api = HfApi()
    try:
        history = api.list_repo_commits(name, repo_type="dataset") if _START.fullmatch(revision) else []
        commits = (each.commit_id for each in history if each.commit_id.startswith(revision))
        commit = next(commits, None) or api.dataset_info(name, revision=revision, timeout=_SECONDS).sha
    except Exception as error:  # of the Hub, its client and the network; reading the data set says what is missing
        reason = " ".join(str(error).split())[:200]
        logger.warning("data set %s: the commit of %s is unknown, its rows may change (%s)", name, revision, reason)
        return revision
    return f"{revision}@{commit}" if commit else revision
