"""The paper's theory: every result corrected and, with ``printed=True``, as printed in the paper."""
