"""What is known of decisions afterwards: reasons, records, explanations, advice."""
