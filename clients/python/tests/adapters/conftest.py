from ..live.conftest import world  # noqa: F401
