"""The published schema of every Kubernetes object."""


class SchemaError(Exception):
    """An object is none of the kind that it says it is, and where."""


def check_object(one, version):
    """Compare an object with its schema in this release of Kubernetes, such as ``1.37``; keys that it does not know are refused.

    Raises:
        SchemaError: It does not fit.
    """
    # Imported where it is used: a library below it reads a grammar, which takes a second of each process that collects tests.
    import kubernetes_validate

    try:
        kubernetes_validate.validate(one, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        raise SchemaError(f"{error.message} at {list(error.path)}") from error
