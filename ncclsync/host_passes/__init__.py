"""Make a finished program cheaper where all towers share the host's memory."""
