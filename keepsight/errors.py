"""The one error that is the user's to mend. Every folder may import this file; it imports nothing of ours."""


class UserError(ValueError):
    """Bad input: the message is one line that names the file, field or value, what was expected, and what to do.

    The command line prints the message without a traceback and ends with exit code 2.
    """
