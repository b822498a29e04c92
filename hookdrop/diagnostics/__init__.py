"""What watches the hooks: checks, measurements, recordings and dry runs. The hooks never import it."""
