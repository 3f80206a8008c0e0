"""What goes on the hub: model cards and the exporter."""
