"""Growth of drafts, level by level: chains, static trees and dynamic trees."""
