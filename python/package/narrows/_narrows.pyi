__version__: str

def answer(arguments: list[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command."""
