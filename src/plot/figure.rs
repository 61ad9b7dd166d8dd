//! Pictures with captions.

use super::picture::Picture;

/// A picture with a sentence about it.
#[derive(Clone, Debug)]
pub struct Figure {
    /// The picture.
    pub picture: Picture,
    /// The sentence.
    pub caption: String,
}

impl Figure {
    /// The figure of a picture, if there is one.
    pub fn of(picture: Option<Picture>, caption: &str) -> Option<Figure> {
        picture.map(|picture| Figure { picture, caption: caption.to_owned() })
    }
}
