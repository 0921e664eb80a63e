"""How exported rollouts are laid out in files; ``capture_server.trajectories.export`` opens them.

``packets`` says what an export holds, whatever the file format; ``jsonl``, ``columnar`` with
``columnar_reader`` (Arrow, Parquet) and ``flat`` (safetensors, npz) each write and read packets
and know nothing else.
"""
