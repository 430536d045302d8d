from typing import Any
def generate(facade: Any, groups: int, args: Any, kwargs: Any) -> Any:
    """x"""
    return type(facade).generate(facade, *args, **kwargs)
