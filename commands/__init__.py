"""The command line: `cli.py` reads it, `config.py` lists the commands and their keys, other files run them."""
