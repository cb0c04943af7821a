"""The parts of make_offline_bundle.py and install_offline_bundle.sh."""
