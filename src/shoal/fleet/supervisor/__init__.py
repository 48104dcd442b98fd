"""The supervisor behind ``shoal run``: starts the coordinator and the workers, and keeps them.

Importing this package imports neither torch nor typer.
"""
