"""What SGLang calls in every process: register the algorithms and the hooks they need."""


def register() -> None:
    """Entry point of group `sglang.srt.plugins`. Idempotent, light, imports SGLang lazily.

    SGLang logs what a plug-in raises and goes on, so that a user would only read "unknown
    algorithm". Hence nothing here may fail for a reason other than an SGLang that moved, and that
    reason is said in one line before it is raised.
    """
    import logging

    try:
        from sglang_dart.engine import algorithm, patches, resolution

        algorithm.register()
        patches.install()
        resolution.install()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        logging.getLogger(__name__).error(
            "sglang-dart could not attach to this SGLang: %s; run `sglang-dart doctor`", error
        )
        raise
