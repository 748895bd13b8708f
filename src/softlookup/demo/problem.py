"""The one exception of the demo: what went wrong and what to install or pass, in one line."""


class DemoProblem(Exception):
    """Shown to the user as it stands; the command then ends with exit code 2."""
