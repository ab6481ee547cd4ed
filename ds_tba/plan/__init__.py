"""The adaptive placement: measures steps, plans placements, and watches that plans keep their promises."""
