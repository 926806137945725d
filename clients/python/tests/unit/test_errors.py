"""The README documents all error classes."""

from pathlib import Path

from kvatlas import errors


def test_errors_are_documented() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    classes = errors.KvatlasError.__subclasses__()
    assert len(classes) >= 20
    for c in classes:
        assert c.__doc__ and c.__name__ in errors.__all__
        assert f"| `{c.__name__}` | `{c.CODE}` | {c.__doc__} |" in readme


def test_an_unknown_code_is_the_base_class() -> None:
    error = errors.error_of({"error": {"code": "new_code", "message": "text"}})
    assert type(error) is errors.KvatlasError and error.code == "new_code"
