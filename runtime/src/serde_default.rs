//! Optional fields of files.

/// Whether a field has its default, and need not be written.
pub(crate) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}
