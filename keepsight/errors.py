"""The one error that is the user's to mend. Every folder may import this file; it imports nothing of ours."""

from collections.abc import Mapping


class UserError(ValueError):
    """Bad input: the message is one line that names the file, field or value, what was expected, and what to do.

    The command line prints the message without a traceback and ends with exit code 2.
    """


def require_whole(name: str, least: int = 0, **values: object) -> None:
    """Refuse values that are no whole numbers of at least `least`.

    Args:
        name: Name of what has the values, for the message.
        least: Smallest value allowed.
        values: The values by the names that the message gives them.

    Raises:
        UserError: with one line that names the first value refused.
    """
    for field, value in values.items():
        if type(value) is not int or value < least:
            raise UserError(f"{name}: {field} {value!r} must be a whole number of at least {least}")


def require_same(what: str, found: Mapping[str, object], wanted: Mapping[str, object], advice: str) -> None:
    """Refuse to go on with what an earlier run began with other settings.

    Args:
        what: What was begun, such as `runs/data: this data was made`.
        found: Settings of the earlier run, by name.
        wanted: Settings of now.
        advice: What to do.

    Raises:
        UserError: with one line that lists every difference.
    """
    names = [name for name in {**found, **wanted} if found.get(name) != wanted.get(name)]
    if names:
        listed = "; ".join(f"{name}={found.get(name)!r}, now it is {wanted.get(name)!r}" for name in names)
        raise UserError(f"{what} with {listed}; {advice}")
