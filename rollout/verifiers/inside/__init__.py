"""What runs inside the sandbox: standard library only, imported there without this package."""
