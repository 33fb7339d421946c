"""Hub ids (`org/name`): fetch what a build needs of a repository, or find it in the local cache."""

from pathlib import Path

from trtforge.plugins.errors import CheckpointError

_COMMON = ["*.json", "*.jinja", "tokenizer.model"]


def fetch(repo_id: str) -> Path:
    """The local directory of a hub repository, downloaded if need be; safetensors are preferred, and PyTorch
    files fetched only where there are none. Raises CheckpointError when it cannot be had."""
    directory = _download(repo_id, [*_COMMON, "model*.safetensors"])
    if not any(directory.glob("model*.safetensors")):
        directory = _download(repo_id, [*_COMMON, "pytorch_model*.bin"])
    return directory


def _download(repo_id: str, patterns: list[str]) -> Path:
    import huggingface_hub

    try:
        found = huggingface_hub.snapshot_download(repo_id, allow_patterns=patterns, ignore_patterns=["*/*"])
    except Exception as e:  # its HTTP library's errors vary with its version; each means: not to be had
        reason = (str(e) or type(e).__name__).splitlines()[0][:200]
        raise CheckpointError(
            f"{repo_id}: no local path of this name, and the hub did not give it ({reason}); download it where "
            "there is a network and pass the local directory"
        ) from e
    return Path(found)
